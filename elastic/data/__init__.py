"""Data that survives resizes: a global order, a cursor in it, and a ledger that proves what was consumed.

order.py         which sample stands at which position; how a step is cut among the ranks     pure
interleave.py    the same for a mixture of sources whose weights change during the run        pure
loader_state.py  what a snapshot keeps of a loader, and the order it stands for               pure
ledger.py        rows of what was consumed, and the audit over all generations                pure
mixture.py       several datasets as one
token_writing.py text into Parquet tokens                                                             no torch
token_files.py   the mapped files as one stream, and fixed-length windows over it
packing.py       documents of any length packed into sequences
batch.py         what a rank receives at one step
prefetch.py      batches fetched ahead of the cursor by worker processes
loader.py        ElasticLoader: batches at the cursor, prefetched by worker processes
"""
