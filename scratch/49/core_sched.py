"""Core's dynamic scheduler (branch dev), its pure functions alone, read from the mirror."""
import ast, subprocess
from math import ceil, log2
from typing import *
REPO="/work/.mirror/NVIDIA+Megatron-LM/repo"
src=subprocess.run(["git","-C",REPO,"show","dev:megatron/core/datasets/data_schedule_utils.py"],capture_output=True,text=True).stdout
tree=ast.parse(src); want={"next_hdp_group_packing_aware","dcp_gpus_needed","align_sample_id_groups"}
body=[n for n in tree.body if isinstance(n,ast.FunctionDef) and n.name in want or isinstance(n,ast.Assign) and getattr(n.targets[0],'id','')=="_DYNAMIC_CP_WORKLOAD_CAP_DELTA"]
from functools import lru_cache
exec(compile(ast.Module(body,[]),"core","exec"),globals())
def schedule(lengths,R,C):
    todo=sorted(enumerate(map(int,lengths)),key=lambda x:-x[1]); out=[]
    while todo:
        _,todo,_,ids=next_hdp_group_packing_aware(todo,R,max_seq_len_per_rank=C,min_cp_size=1); out.append(ids)
    return out
