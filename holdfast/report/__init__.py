"""What runs came to: tables for the terminal and for Markdown, and one self-contained HTML page."""
