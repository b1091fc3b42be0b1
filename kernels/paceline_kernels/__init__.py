"""The C library of Paceline, a file for each level of x86-64; `paceline` chooses and loads one.

The name of a file has a hash of the C sources and compiler options, so that a paceline with other
sources finds none.
"""
