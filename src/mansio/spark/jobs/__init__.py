"""Jobs of `mansio pipeline`, one module and one function each."""
