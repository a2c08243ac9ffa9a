"""The operations under the layer: row copies, grouped GEMMs, the gated activation."""
