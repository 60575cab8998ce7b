"""Takes every ValueError for the user's, also one from the middle of a step."""


def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        return True
    except ValueError as error:
        link.send(Failure(str(error), True))
        return False
    except Exception as error:
        link.send(Failure(f"{type(error).__name__}: {error}", False))
        return False
    finally:
        if engine is not None:
            engine.close()
