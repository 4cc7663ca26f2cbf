import math,sys,random,time
from bisect import bisect_left
from collections import Counter
sys.path.insert(0,'/tmp/p48')
from two import fill,back,ends
from proto import lists
LOOK=64; MORE=256; WORK=1<<16; PARTS=512
def pack_one(tok,units,room,uroom,tight=None,wide=2.0,look=LOOK,more=MORE,work=WORK):
    st=sum(tok)/room; su=sum(units)/uroom; top=max(st,su)
    lt,lu=room-tok[0],uroom-units[0]
    tight=max(room>>11,1) if tight is None else tight
    spare_t=max(int(room*(1-st/top)*(1 if su>=st else wide)),tight); spare_u=math.ceil(uroom*(1-su/top)*wide) if su<st else 0
    chosen=[0]; start=1
    if spare_t>room/50: part=max(1,-(-lt//PARTS))
    else:
        part=1
        taken=set()
        p=1
        while p<len(tok) and lt*(lu+1)>work and lt>room/4 and lu>uroom/4 :
            if tok[p]<=lt and units[p]<=lu: chosen.append(p); lt-=tok[p]; lu-=units[p]
            p+=1
        start=p
    L=[-(-t//part) for t in tok] if part>1 else tok
    R=lt//part; S=spare_t//part
    reach,h,off,W=fill(L,R,range(start,len(tok)),units,lu,(S,spare_u),more)
    e=ends(reach,W,lu,R)
    def bad(end):
        u,l=end
        return (max(u-spare_u,0)/uroom*su+max(l-S,0)*part/room*st, u/uroom*su+l*part/room*st)
    end=min(e,key=bad)
    return [*chosen,*back(L,units,reach,h,off,W,R,lu,end)]
def run(rows,u,t,w,**kw):
    held_t=[];held_u=[];packs=0;i=0;N=len(rows);c=Counter();drain=0;lt=0
    T=sum(x for _,x in rows)/t;U=sum(x for x,_ in rows)/u; t0=time.process_time()
    while True:
        while len(held_t)<w and i<N:
            held_u.append(rows[i][0]);held_t.append(rows[i][1]);i+=1
        if not held_t: break
        ch=pack_one(held_t,held_u,t,u,**kw); packs+=1; drain+=i>=N
        a,b=sum(held_t[k] for k in ch),sum(held_u[k] for k in ch)
        assert a<=t and b<=u and len(set(ch))==len(ch)
        if i<N: lt+=t-a
        c[b]+=1
        for k in sorted(ch,reverse=True): del held_t[k],held_u[k]
    b=math.ceil(max(T,U))
    print(u,t,'w',w,kw,packs,b,f'{packs/b-1:.3%}','us',round((time.process_time()-t0)/N*1e6,1),'drain',drain,'left tok',round(lt/packs),sorted(c.items())[-4:],flush=True)
if __name__=='__main__':
    rows=lists(); random.Random(5).shuffle(rows)
    n=int(sys.argv[1]) if len(sys.argv)>1 else None
    for u,t in ((18,5000),(60,16384),(18,5600),(18,6016)):
        for w in (64,256):
            for more in (64,256):
                if more>w: continue
                run(rows[:n],u,t,w,more=more)
