"""Loads the built module under whatever torch runs this, and checks an op's results.

    python tests/build/check_binary.py

Needs nothing but torch, so that the binary can be tried under a torch it was not built with.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "csrc"))
import adaptive_spec_ext as ext  # noqa: E402


def main() -> None:
    drafts = torch.tensor([[1, 2, 3], [4, 9, 6]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 7], [4, 5, 6, 8]]), 11).float()
    output = torch.zeros(2, 4, dtype=torch.int32)
    count = torch.zeros(2, dtype=torch.int32)
    lens = torch.zeros(2, dtype=torch.int32)
    ext.verify_chain_greedy_from_logits(drafts, logits, output, count, accept_lens=lens)
    assert output.tolist() == [[1, 2, 3, 7], [4, 5, -1, -1]], output
    assert count.tolist() == [3, 1], count
    assert lens.tolist() == [4, 2], lens
    try:
        ext.verify_chain_greedy_from_logits(drafts, logits, output, count.long())
    except ValueError as error:
        assert "`accept_token_num`: expected dtype int32, got int64" in str(error), error
    else:
        raise AssertionError("a wrong dtype was accepted")
    print(f"built with torch {ext.build_info['torch_version']}, works under {torch.__version__}")


if __name__ == "__main__":
    main()
