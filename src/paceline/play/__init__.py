"""A page in the browser on which a pair decodes.

runs.py     what a request asks for, and the events of decoding it
server.py   the page and its requests; who may send them
static/     the page, which only draws the events
"""
