"""``python -m flash_ext demo``: what this machine runs, whether it is right, and one real use.

`accuracy` compares forward and backward with the fp64 oracle; `model_files`, `encoder` and `similarity` put flash_ext
into a sentence encoder and compare with the unmodified one; `show` runs and prints all of it.
"""
