import sys; sys.path.insert(0,'/tmp/p48')
from proto import lists
import random,time
from collections import Counter
def pack_one(tok,units,room,uroom,K,scarce_u,slack,key,need):
    room-=tok[0]; left_u=uroom-units[0]
    cand=[]
    for p in range(1,len(tok)):
        if tok[p]<=room and units[p]<=left_u:
            cand.append(p)
            if len(cand)>=K: break
    if key: cand.sort(key=lambda p:key(tok[p],units[p]))
    levels=[0]*(left_u+1); levels[0]=1<<room
    hist=[];off=[]; top=0
    done=(1<<(need+1))-1
    for p in cand:
        l=tok[p];u=units[p]
        grown=levels.copy()
        for lv in range(min(top,left_u-u)+1):
            r=levels[lv]
            if r and (m:=r>>l): grown[lv+u]|=m
        top=min(left_u,top+u)
        hist.append(levels); off.append(p); levels=grown
        if scarce_u:
            if levels[left_u]&done: break
        elif any(lv&done for lv in levels[:top+1]): break
    ends=[(lv,(r&-r).bit_length()-1) for lv,r in enumerate(levels) if r]
    if scarce_u: lv,left=max(ends,key=lambda e:(e[0],-e[1]))
    else: lv,left=min(ends,key=lambda e:(e[1],-e[0]))
    chosen=[0]
    for earlier,p in zip(reversed(hist),reversed(off)):
        if not earlier[lv]>>left&1:
            chosen.append(p); lv-=units[p]; left+=tok[p]
    return chosen
def run(rows,room,uroom,window,K,key,needf):
    held_t=[];held_u=[];packs=0;i=0;N=len(rows)
    T=sum(t for _,t in rows)/room;U=sum(u for u,_ in rows)/uroom
    t0=time.process_time(); c=Counter(); drain=0
    while True:
        while len(held_t)<window and i<N:
            held_u.append(rows[i][0]);held_t.append(rows[i][1]);i+=1
        if not held_t: break
        st,su=sum(held_t)/room,sum(held_u)/uroom
        ch=pack_one(held_t,held_u,room,uroom,K,su>=st,8,key,needf(st,su,room))
        s=set(ch); packs+=1; drain+=i>=N
        c[sum(held_u[k] for k in ch)]+=1
        for k in sorted(ch,reverse=True): del held_t[k],held_u[k]
    return packs,T,U,(time.process_time()-t0)/N*1e6,drain,c
keys={'age':None,'units desc':lambda t,u:-u,'units,len desc':lambda t,u:(-u,-t),'units desc,len asc':lambda t,u:(-u,t)}
needs={'8':lambda st,su,room:8,'slack':lambda st,su,room:max(8,int(room*(1-st/su)) if su>st else 8)}
rows=lists(); random.Random(5).shuffle(rows)
for u,t in ((18,6016),(24,8192),(18,5600)):
  for kn in keys:
    for nn in needs:
      for w,K in ((64,64),(256,64),(256,256)):
        if K==256 and nn=='8': continue
        p,T,U,us,drain,c=run(rows,t,u,w,K,keys[kn],needs[nn]); b=max(T,U)
        print(u,t,kn,nn,'w',w,'K',K,p,f'{p/b-1:.3%}','us',round(us,1),'drain',drain,sorted(c.items())[-4:],flush=True)
