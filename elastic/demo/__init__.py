"""What ``elastic demo`` trains: a small byte-level GPT on the sources of the Python standard library.

text.py    the sources as Parquet tokens
gpt.py     the model
train.py   the train function, as a user would write it
"""
