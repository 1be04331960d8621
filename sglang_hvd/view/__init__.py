"""The token view: replies whose tokens show where they came from, as one HTML page."""
