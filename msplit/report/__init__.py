"""Results as people and programs read them: text, Markdown, JSON, HTML, traces.

Each kind of result has a module that turns it into a document of tables and lines (or JSON), and `render` prints documents.
"""
