"""Replays a step policy against a cost table and simulated traffic, and compares it with an oracle.

`acceptance` draws how many drafts would be accepted, `arrivals` when requests come and how long
they are, `simulate` runs a policy over both, `policies` lists what is compared.
"""
