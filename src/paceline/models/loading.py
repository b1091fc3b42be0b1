def load_model(*args, **kwargs):
    pass
