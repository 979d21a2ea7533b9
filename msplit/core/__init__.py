"""Plain data that everything else works on: graphs as arrays, DAGs, checks of both."""
