from planner.models.spec import *
def tensor_parallel_problem(model, tp):
    for l,_ in model.layer_groups:
        for m in l.mixers:
            h=getattr(m,'heads',None)
            if h and h%tp: return f"{h} heads do not divide by {tp}"
    if model.vocab%tp: return f"vocab"
    return None
def pipeline_parallel_problem(model,pp):
    return None if pp<=len(model.layers) else "too many stages"
def expert_parallel_problem(model, ep):
    for l,_ in model.layer_groups:
        if isinstance(l.mlp,MoeMlp) and l.mlp.experts%ep: return "experts"
    return None
