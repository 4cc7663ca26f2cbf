import numpy as np
from compare_lib import *
from core_sched import schedule
rng=np.random.default_rng(0); mu=np.log(1024)-1.5**2/2
for R in (16,64):
    for n in (8,32):
        L=np.clip(np.exp(rng.normal(mu,1.5,R*n)),128,8192).astype(int); total=sum(cost(int(l)) for l in L)
        m=schedule(L,R,2048); t=0
        for ids in m:
            t+=max(sum(cost(int(L[i]))/sum(ids[q]==ids[r] for q in range(R)) for i in ids[r]) for r in range(R))
        load,out,ks,_=group(L,R,2048)
        print(R,n,"core, barrier each micro-batch",round(total/(R*t),3),"own clocks",round(total/(R*simulate(m,L,R,.0)),3),"micro",len(m),"ours",round(total/(R*group(L,R,2048,c=0)[0].max()),4))
