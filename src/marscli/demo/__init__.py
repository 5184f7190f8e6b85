"""The embedded default: a tiny model, a tiny tokenizer and generated word problems, all made by code.

`python -m marscli.demo` runs the four commands on them, from random weights to a table; `make demo` sets up first.
"""
