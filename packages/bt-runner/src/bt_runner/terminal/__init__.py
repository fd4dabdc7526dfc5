"""What the commands share: options, a file of prompts, what stands around a run."""
