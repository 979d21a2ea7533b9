"""The commands: options, and what is printed.

One file per command: it turns options into arguments of the library's functions and hands the result to `report`. Nothing is decided here.
"""
