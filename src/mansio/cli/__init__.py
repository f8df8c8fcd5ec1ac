"""The `mansio` command. One file per noun; heavy modules are imported inside the commands that need them."""
