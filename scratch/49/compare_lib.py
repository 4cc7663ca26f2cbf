import numpy as np, sys, time
from proto import group, cost, comm, aligned
from core_sched import schedule
def simulate(micro, lengths, R, c):
    """Clock of each rank; those that share a sample start a micro-batch together."""
    clock=np.zeros(R)
    for ids in micro:
        by={}
        for r in range(R): by.setdefault(tuple(ids[r]),[]).append(r)
        new=clock.copy()
        for members_ids,rs in by.items():
            k=len(rs); t=sum(cost(aligned(int(lengths[i]),k))/k+comm(int(lengths[i]),k,c) for i in members_ids)
            new[rs]=clock[rs].max()+t
        clock=new
    return clock.max()
def static(lengths,R,cp,C,c):
    """Plan at static CP: rows of cp*C, packs by best fit, steps even (dealt to the least loaded group)."""
    g=R//cp; load=np.zeros(g)
    for l in sorted(map(int,lengths),reverse=True):
        load[load.argmin()]+=cost(aligned(l,cp))/cp+comm(l,cp,c)
    return load.max()

