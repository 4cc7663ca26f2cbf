import sys; sys.path.insert(0,'/tmp/p48')
from proto import *
from collections import Counter
rows=lists(); print(Counter(u for u,_ in rows)); random.Random(5).shuffle(rows)
import proto
for (u,t) in ((18,6016),(24,8192)):
    held_t=[];held_u=[];i=0;N=len(rows);c=Counter();last=0;n=0;compo=Counter()
    while True:
        while len(held_t)<256 and i<N:
            held_u.append(rows[i][0]);held_t.append(rows[i][1]);i+=1
        if not held_t: break
        ch=pack_one(held_t,held_u,t,u,64,True,8); s=set(ch); n+=1
        tiles=sum(held_u[k] for k in ch); c[tiles]+=1
        compo[tuple(sorted(held_u[k] for k in ch))]+=1
        if i>=N: last+=1
        held_t=[x for k,x in enumerate(held_t) if k not in s]; held_u=[x for k,x in enumerate(held_u) if k not in s]
    print(u,t,n,'packs in drain',last,sorted(c.items()),compo.most_common(8))
