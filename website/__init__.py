"""The documentation site: what MkDocs builds from docs/ and from the code (`make docs`)."""
