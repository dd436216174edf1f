"""The table: how functions and layers of torch are called on stacked rows.

:mod:`functions` and :mod:`layers` answer for a call; :mod:`calls` is what entries are made of. The
other files have the entries: :mod:`numbers`, :mod:`dims`, :mod:`shape`, :mod:`neural`.
"""
