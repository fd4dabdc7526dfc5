"""What the commands share: kinds of options, options of several commands, a bar, one thread."""
