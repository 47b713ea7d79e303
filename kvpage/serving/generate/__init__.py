"""Serve `model.generate` from paged blocks, by KVPageCache and KVPageCachePool.

A pool owns the blocks of one model. A cache holds the rows of one call of `generate`. This is the way of one forward
pass, from the call to the blocks:

    model(input_ids, past_key_values=cache)
      │
      ├── ForwardHooks       find the cache among the arguments, before the model computes anything
      │     └─► ForwardInputs    read the tokens, the place of the first, and which rows show all of their tokens
      │     └─► KVPageCache.begin_forward
      │           └─► CachedRows     check the tokens, reserve blocks for them ──────────► BlockManager
      │
      ├── each layer calls KVPageCache.update(K, V, layer) and attends to the rows that it returns
      │     ├─► WorkingRows      append to K and V in one piece, and return that piece
      │     └─► LayerBlocks      without working memory: write into blocks, gather the rows ──► kvpage.ops
      │
      └── ForwardHooks       see the call return
            └─► KVPageCache.finish_forward
                  └─► CachedRows     count the tokens; the next forward commits whole blocks, for other calls to find

Modules. Each imports only modules in the lines above its own:

    row_slots        RowSlots: the slots that a forward writes, and the block tables that it reads
    layer_blocks     LayerBlocks: one layer's K and V, from transformers' tensors into blocks and back
    working_rows     WorkingRows: K and V of a cache's rows in one piece a layer
    cached_rows      CachedRows: the sequences of one batch in the block manager
    forward_inputs   ForwardInputs: the arguments of a forward that decide over K and V
    forward_hooks    ForwardHooks: report the forwards that are given a cache
    kv_page_layer    KVPageLayer: a layer of a cache, as transformers reads it
    states           the states of the rows, for models whose layers keep some
    view             the view of a model that computes the same bits, by a runner, without hooks
    model_blocks     ModelBlocks: the blocks of one model, without any check
    kv_page_cache    KVPageCache: the cache of one call
    pool_check       verify_blocks: refuse a model whose logits over blocks are not its own
    cache_pool       KVPageCachePool: blocks of a model that has passed the checks
    alternative      names_alternative: name KVPageCache in the error by which Engine refuses a model
"""
