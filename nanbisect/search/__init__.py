"""Fewer cells: outcomes so far in, the next cells and an account of what is known out. Pure.

`values` has what goes in and out, `space` the grid as levels by position, `propose` the door. All that
needs numpy lies behind that door and is imported when it is first opened.
"""
