"""Plans: an assignment made executable, the orders in which it is recorded, its proof and its file."""
