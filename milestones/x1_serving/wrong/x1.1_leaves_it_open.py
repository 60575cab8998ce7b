"""Does not close the engine after an exception: its ranks and their memory stay."""


def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        engine.close()
        return True
    except Exception as error:
        is_user_error = engine is None and isinstance(error, ValueError)
        link.send(Failure(str(error) if is_user_error else f"{type(error).__name__}: {error}", is_user_error))
        return False
