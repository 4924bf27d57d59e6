"""Warm starts: one server an environment imports what the training needs, and forks a child an attempt.

`servers.py` is the driver's side. The rest runs in the training's own interpreter, started by path and
without nanbisect: `server.py` imports and forks, `preload.py` says what is imported, `launcher.py` asks
`accelerate launch` what it would do, `pair.py` forks a shim with its training process, `child.py` turns the
latter into the process that a cold start gives.
Linux only: elsewhere attempts start cold.
"""
