"""Execution on GPUs.

driver.py     the interface of drivers, and which of them runs models
cuda.py       NVIDIA's driver, by ctypes
space.py      the memory of one executable on a device
modules.py    the code of one executable on a device
"""
