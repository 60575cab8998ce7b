"""Benchmarks: `serve` runs requests on a clock, `report` keeps and prints results, and each other module measures one thing."""
