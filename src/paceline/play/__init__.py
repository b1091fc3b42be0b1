"""A page in the browser on which a pair decodes: `runs` decodes, `server` serves, static/ draws."""
