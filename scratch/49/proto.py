"""Prototype: who shares what in a step with dynamic context parallelism."""
import sys, time
import numpy as np

def aligned(L, k): return -(-L // (2*k)) * 2*k if k > 1 else L
LIN = 24576
def cost(L): return LIN*L + L*L
def comm(L, k, c): return c*LIN*L*(k-1)/k   # of each rank of the group

def group(lengths, R, C, *, c=0.009, share=0.25, M=None):
    order = np.argsort(-lengths, kind="stable")
    total = sum(cost(int(l)) for l in lengths)
    T = total/R
    ks = np.ones(len(lengths), int)
    for i,l in enumerate(lengths.tolist()):
        k=1
        while k < R and (aligned(l,k)//k > C or cost(l)/k > share*T): k*=2
        ks[i]=k
    load=np.zeros(R)
    seq=[[] for _ in range(R)]       # per rank: list of (k, ids, tokens)
    for k in sorted(set(ks.tolist()),reverse=True):
        mine=[i for i in order.tolist() if ks[i]==k]
        for i in mine:
            l=int(lengths[i])
            blocks=load.reshape(-1,k)[:,0]
            b=int(blocks.argmin())
            load[b*k:(b+1)*k]+=cost(aligned(l,k))/k+comm(l,k,c)
            for r in range(b*k,(b+1)*k): seq[r].append((k,i,aligned(l,k)//k))
    # cut in micro-batches: best fit decreasing per (rank block, k)
    out=[]
    for r in range(R):
        mbs=[]
        for k in sorted({e[0] for e in seq[r]},reverse=True):
            bins=[]
            for _,i,t in [e for e in seq[r] if e[0]==k]:
                fits=[b for b in bins if b[0]+t<=C]
                if fits:
                    b=max(fits,key=lambda b:b[0]); b[0]+=t; b[1].append(i)
                else: bins.append([t,[i]])
            mbs+=[(k,b[1]) for b in bins]
        out.append(mbs)
    return load, out, ks, total

if __name__=="__main__":
    rng=np.random.default_rng(0)
    mu=np.log(1024)-1.5**2/2
    for R,gb in ((16,8*4*4),(32,8*8*4),(64,8*16*4)):
        effs=[];ms=[];short=[];kk=[]
        for s in range(10):
            L=np.clip(np.exp(rng.normal(mu,1.5,gb*8)),128,8192).astype(int)
            for C in (2048,):
                t=time.process_time()
                load,out,ks,total=group(L,R,C,share=float(sys.argv[1]) if len(sys.argv)>1 else .25)
                t=time.process_time()-t
                effs.append(total/(R*load.max())); n=[len(m) for m in out]; ms.append((min(n),max(n))); 
                short.append(min(sum(len(x[1]) for x in m) for m in out)); kk.append(np.bincount(ks))
        print(R, len(L),"eff",np.mean(effs).round(4),min(effs),"micro-batches",ms[0],"fewest samples",min(short),kk[0].nonzero()[0],kk[0][kk[0]>0],f"{t*1e3:.0f} ms")
