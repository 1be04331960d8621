"""Builds the demo models: tokenizer, target model, EAGLE3 drafter and payoff predictor."""
