"""Recurrent layers of torch over sequences: see :mod:`pyg_dynbatch.autobatch.layers`."""

from pyg_dynbatch.autobatch.layers import is_layer as is_layer
from pyg_dynbatch.autobatch.layers import layer_form as layer_form
