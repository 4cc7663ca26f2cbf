import json,glob,random,sys,time
import numpy as np
def lists():
    rows=[]
    for f in sorted(glob.glob('/tmp/om/*.json')):
        try: rows+=[(d['vit_num'],d['token_num']) for d in json.load(open(f))]
        except Exception: pass
    return rows
def pack_one(tok,units,room,uroom,K,scarce_u,slack):
    """tok, units: lists oldest first; 0 included. returns positions"""
    room-=tok[0]; left_u=uroom-units[0]
    levels=[0]*(left_u+1); levels[0]=1<<room
    hist=[];off=[]; top=0; n=0
    done=(1<<(slack+1))-1
    for p in range(1,len(tok)):
        l=tok[p];u=units[p]
        if l>room or u>left_u: continue
        grown=levels.copy(); full=False
        for lv in range(min(top,left_u-u)+1):
            r=levels[lv]
            if r and (m:=r>>l):
                grown[lv+u]|=m
        top=min(left_u,top+u)
        hist.append(levels); off.append(p); levels=grown
        n+=1
        if scarce_u:
            if levels[left_u]&done: break
        else:
            if any(lv&1 for lv in levels[:top+1]): break   # tokens exactly full
        if n>=K: break
    # choose end
    best=None
    ends=[(lv,(r&-r).bit_length()-1) for lv,r in enumerate(levels) if r]
    if scarce_u: lv,left=max(ends,key=lambda e:(e[0],-e[1]))
    else: lv,left=min(ends,key=lambda e:(e[1],-e[0]))
    chosen=[0]
    for earlier,p in zip(reversed(hist),reversed(off)):
        if not earlier[lv]>>left&1:
            chosen.append(p); lv-=units[p]; left+=tok[p]
    return chosen
def run(rows,room,uroom,window,K,slack=8,scarce=None):
    held_t=[];held_u=[];packs=0;it=iter(rows);i=0;N=len(rows);fills=[]
    T=sum(t for _,t in rows)/room;U=sum(u for u,_ in rows)/uroom
    t0=time.process_time()
    steady=None
    while True:
        while len(held_t)<window and i<N:
            held_u.append(rows[i][0]);held_t.append(rows[i][1]);i+=1
        if not held_t: break
        if i>=N and steady is None: steady=packs
        if scarce is None: su=sum(held_u)/uroom>=sum(held_t)/room
        else: su=scarce
        ch=pack_one(held_t,held_u,room,uroom,K,su,slack)
        s=set(ch); packs+=1
        held_t=[t for k,t in enumerate(held_t) if k not in s]; held_u=[t for k,t in enumerate(held_u) if k not in s]
    return packs,steady,T,U,(time.process_time()-t0)/N*1e6
if __name__=='__main__':
    rows=lists(); random.Random(5).shuffle(rows)
    print(len(rows))
    for u,t in ((18,6016),(24,8192),(18,5000),(18,5600)):
        for w,K in ((64,32),(64,64),(256,32),(256,64),(1024,64)):
            p,s,T,U,us=run(rows,t,u,w,K)
            b=max(T,U); print(u,t,'w',w,'K',K,'packs',p,'bound',int(-(-b//1)),f'{p/b-1:.3%}','T',int(T),'U',int(U),'us',round(us,1),flush=True)
