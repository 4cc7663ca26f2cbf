"""New limited packer prototype."""
import math
from bisect import bisect_left
LEVELS=64; LOOK=256
def fill(lengths,room,positions,units=None,unit_room=0,slack=(0,0),most=None):
    """exact subset sum: tokens x units. slack: (room that may stay free, units that may stay free)"""
    W=2*room+1
    states=1
    reach=1<<(unit_room*W+room)
    if unit_room:
        one=(1<<(room+1))-1; valid=0
        # periodic mask by doubling
        valid=one; n=1
        while n<=unit_room: valid|=valid<<(n*W); n*=2
        valid&=(1<<((unit_room+1)*W))-1
        g=(1<<(min(slack[0],room)+1))-1; good=0
        for u in range(min(slack[1],unit_room)+1): good|=g<<(u*W)
    else: good=(1<<(slack[0]+1))-1; valid=None
    history=[reach]; offered=[]
    if not reach&good:
        for p in positions:
            l=lengths[p]; u=units[p] if units else 0
            if l>room or u>unit_room: continue
            moved=reach>>(u*W+l)
            if valid is not None: moved&=valid
            if not moved: continue
            reach|=moved
            history.append(reach); offered.append(p)
            if reach&good: break
            if most is not None and len(offered)>=most: break
    return reach,history,offered,W
def back(lengths,units,reach,history,offered,W,room,unit_room,end):
    u,left=end; chosen=[]; taken=len(offered)
    while u<unit_room or left<room:
        bit=u*W+left
        taken=bisect_left(history,1,hi=taken,key=lambda r:r>>bit&1)-1
        p=offered[taken]; chosen.append(p)
        u+=units[p] if units else 0; left+=lengths[p]
    return chosen
def ends(reach,W,unit_room,room):
    one=(1<<(room+1))-1
    out=[]
    for u in range(unit_room+1):
        r=(reach>>(u*W))&one
        if r: out.append((u,(r&-r).bit_length()-1))
    return out
def pack_one(tok,units,room,uroom,parts=512,look=LOOK,tight=8):
    st=sum(tok)/room; su=sum(units)/uroom
    top=max(st,su)
    left_t,left_u=room-tok[0],uroom-units[0]
    slack_t=max(int(room*(1-st/top)),tight); slack_u=int(uroom*(1-su/top))
    if slack_u>=1 and su<0.9*st or left_u<0: pass
    # coarse tokens if there is slack
    part=1
    if slack_t>room/50: part=max(1,-(-left_t//parts))
    L=[-(-t//part) for t in tok] if part>1 else tok
    R=left_t//part
    S=slack_t//part
    reach,h,off,W=fill(L,R,range(1,len(tok)),units,left_u,(S,slack_u),look)
    e=ends(reach,W,left_u,R)
    # fewest over the slack; the scarcer first
    def bad(end):
        u,l=end
        return (max(u-slack_u,0)/uroom*su+max(l-S,0)*part/room*st, u/uroom*su+l*part/room*st)
    end=min(e,key=bad)
    return [0,*back(L,units,reach,h,off,W,R,left_u,end)]
if __name__=='__main__':
    import sys,random,time
    sys.path.insert(0,'/tmp/p48')
    from proto import lists
    rows=lists(); random.Random(5).shuffle(rows)
    if len(sys.argv)>1: rows=rows[:int(sys.argv[1])]
    from collections import Counter
    for u,t in ((18,6016),(24,8192),(48,16384),(18,5000),(60,16384),(18,5600)):
      for w in (64,256,1024):
        held_t=[];held_u=[];packs=0;i=0;N=len(rows);c=Counter();drain=0
        T=sum(x for _,x in rows)/t;U=sum(x for x,_ in rows)/u; t0=time.process_time()
        while True:
            while len(held_t)<w and i<N:
                held_u.append(rows[i][0]);held_t.append(rows[i][1]);i+=1
            if not held_t: break
            ch=pack_one(held_t,held_u,t,u); packs+=1; drain+=i>=N
            assert sum(held_t[k] for k in ch)<=t and sum(held_u[k] for k in ch)<=u and len(set(ch))==len(ch)
            c[sum(held_u[k] for k in ch)]+=1
            for k in sorted(ch,reverse=True): del held_t[k],held_u[k]
        b=math.ceil(max(T,U))
        print(u,t,'w',w,packs,b,f'{packs/b-1:.3%}','us',round((time.process_time()-t0)/N*1e6,1),'drain',drain,sorted(c.items())[-4:],flush=True)
