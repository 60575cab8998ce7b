"""Says Ready with the numbers of a loop that it throws away, and only then makes the one that turns: what fails there comes after Ready."""


def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        num_blocks = EngineLoop(engine, link).outputs().stats.kv_blocks_total
        link.send(Ready(pickle.dumps(plain(engine.setup)), num_blocks))
        loop = EngineLoop(engine, link)
        while loop.turn():
            pass
        return True
    except Exception as error:
        is_user_error = engine is None and isinstance(error, ValueError)
        if not is_user_error:
            logger.exception("the engine has ended")
        link.send(Failure(str(error) if is_user_error else f"{type(error).__name__}: {error}", is_user_error))
        return False
    finally:
        if engine is not None:
            engine.close()
