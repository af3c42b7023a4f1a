"""Code of launches: device functions for NVPTX, and the host's part that starts them.

context.py     state while a device function, or the host's part, is emitted
device.py      a launch to a device function: parameters, axes, shared memory, barriers
launch.py      the host's part of a launch: the grid, and the call of the driver
warp.py        warp instructions and shuffles
math.py        functions of float64
"""
