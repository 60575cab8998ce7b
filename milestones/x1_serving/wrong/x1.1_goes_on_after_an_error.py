"""Says that a step failed, and steps on in a state that nobody knows: half a step may be in the cache."""


def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
    except Exception as error:
        is_user_error = engine is None and isinstance(error, ValueError)
        link.send(Failure(str(error) if is_user_error else f"{type(error).__name__}: {error}", is_user_error))
        return False
    is_well = goes_on = True
    while goes_on:
        try:
            goes_on = loop.turn()
        except Exception as error:
            link.send(Failure(f"{type(error).__name__}: {error}", False))
            is_well = False
    engine.close()
    return is_well
