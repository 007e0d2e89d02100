"""Whether a snapshot really resumes: its own train function takes the next steps from it, on several meshes.

contract.py    what may differ, and by how much
probed_run.py  a run that watches itself: state, outputs, gradients, samples, generators
rank.py        the ranks of one mesh, each in a process of its own, with gloo and without Ray
worlds.py      starts those ranks and gathers what they saw
compare.py     the snapshot, the journal and the worlds side by side, judged by the contract
"""
