"""One form for what models spell in many ways, so that later passes have less to know."""
