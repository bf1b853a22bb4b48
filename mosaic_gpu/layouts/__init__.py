"""Where data lies: register arrays over the threads of a warpgroup, shared memory in tiles, TMEM."""
