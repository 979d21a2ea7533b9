"""Convolutions and dense layers that take along what stands in front of them and behind them."""
