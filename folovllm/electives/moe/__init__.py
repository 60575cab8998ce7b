"""Mixture of experts (X4): routing, the experts' layers, the models that have them."""
