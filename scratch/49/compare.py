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
rng=np.random.default_rng(0); mu=np.log(1024)-1.5**2/2
for c in (0.009,0.05):
  for R in (16,32,64):
    e={}
    for s in range(4):
        L=np.clip(np.exp(rng.normal(mu,1.5,R*32)),128,8192).astype(int); total=sum(cost(int(l)) for l in L)
        C=2048
        load,out,ks,_=group(L,R,C,c=c); e.setdefault("ours",[]).append(total/(R*load.max()))
        t=time.process_time(); m=schedule(L,R,C); t=time.process_time()-t
        e.setdefault("core",[]).append(total/(R*simulate(m,L,R,c))); e.setdefault("core s",[]).append(t)
        for cp in (4,8): e.setdefault(f"static {cp}",[]).append(total/(R*static(L,R,cp,C,c)))
    print("comm",c,"R",R,{k:round(float(np.mean(v)),4) for k,v in e.items()},flush=True)
