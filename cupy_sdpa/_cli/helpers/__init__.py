"""Code that the commands share: output, engine selection, npz files, and the input and figure of the demo."""
