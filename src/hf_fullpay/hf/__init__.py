"""The only folder that knows Transformers, PEFT and the Hub."""
