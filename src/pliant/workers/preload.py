"""Imported first by the process that workers are forked from."""

import gc

gc.disable()  # imports leave no garbage, and a fork copies the memory that collections write to
