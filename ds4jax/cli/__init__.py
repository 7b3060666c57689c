"""The command line: `ds4jax serve | precompile | generate | chat | bench | eval | inspect | synth | download`."""
